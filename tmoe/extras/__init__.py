"""Tools that the core never imports: migration from other trainers, upcycling and recovery."""

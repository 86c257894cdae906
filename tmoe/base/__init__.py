"""What every room imports: tables, files, lists and what torch keeps private."""

"""The Transformer, its loss, and the plan that lays it out over a mesh."""

"""The choice of experts: scores, selections, capacity and forced routings."""

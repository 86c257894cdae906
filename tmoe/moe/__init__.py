"""A Mixture-of-Experts layer: route, dispatch, experts, combine."""

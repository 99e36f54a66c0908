"""Ways to prove that no plan is faster than a bound, each by itself."""

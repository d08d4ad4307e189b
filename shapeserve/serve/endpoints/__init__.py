"""What is served: a module for each family of routes, each with a list of them."""

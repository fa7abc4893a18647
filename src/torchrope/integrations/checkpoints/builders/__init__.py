"""Build the model that a saved file describes; one module for each library."""

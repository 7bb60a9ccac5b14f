"""How good features are: retrieval, classification and their pictures, from features alone."""

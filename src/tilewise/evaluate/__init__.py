"""How good a model is: features of data, retrieval, classification, scenes, and their pictures."""

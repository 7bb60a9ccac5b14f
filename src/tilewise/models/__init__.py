"""Models to train: open_clip's, sentence-transformers', timm's, each as one encoder of pairs."""

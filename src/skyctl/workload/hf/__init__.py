"""Models from a folder with a Hugging Face config; ``transformers`` is imported where one is loaded."""

"""Causal language models of Hugging Face's transformers, cut exactly. The only place that knows transformers."""

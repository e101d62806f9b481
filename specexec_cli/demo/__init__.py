"""The demo pair's weights and tokenizer, shipped inside the package."""

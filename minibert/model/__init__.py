"""What BERT is: attention, embeddings, encoder and task heads."""

"""minibert and its peers side by side: the same weights, the same inputs, in one run."""

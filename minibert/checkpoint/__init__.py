"""Where weights come from and go to. Knows files and names, not what BERT is."""

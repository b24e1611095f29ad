"""What the bytes mean: topics, retention, deletion, dedupe, transactions, recovery. No HTTP."""

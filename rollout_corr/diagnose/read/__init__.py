"""Reading dumps of log-probs in blocks of whole sequences."""

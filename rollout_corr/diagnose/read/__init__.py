"""Read dumps of log-probs: files of any known kind, as chunks of whole sequences."""

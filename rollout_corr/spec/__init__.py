"""What may be asked: the frozen, checked types that say what a correction and a loss do."""

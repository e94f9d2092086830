"""What it means, in plain torch: the specification of every backend. Start with correction.py and tokens.py."""

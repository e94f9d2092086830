"""The meaning of every Spec and loss in plain torch, which all backends must match. Read correction.py first."""

"""The comparisons, one file a framework: where its code lies, and `rows(source)`."""

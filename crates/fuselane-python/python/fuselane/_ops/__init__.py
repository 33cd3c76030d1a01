"""The operators, as users call them: one file each."""

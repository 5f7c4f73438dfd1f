"""What crosses a process boundary, as plain typed structs without behaviour. Imports nothing else of this package
except the error classes."""

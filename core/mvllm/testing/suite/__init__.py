"""The tests, a file for each family of clauses. `everything` has them all, to be imported into a file of one's own."""

"""The vocabulary of the contract: pure values and rules, no I/O."""

"""What the tests themselves rely on: ranks and commands in processes that are forked."""

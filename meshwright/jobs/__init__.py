"""What a person asks for, as functions with typed results."""

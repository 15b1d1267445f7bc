"""What carries an axis: collectives with an account, gradient sums under backward, FSDP2 over our collectives."""

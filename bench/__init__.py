"""What dtf costs, beside its peers and beside the floor."""

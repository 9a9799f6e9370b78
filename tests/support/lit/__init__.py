"""LightningModules in the form that Lightning's documentation teaches, on data that they draw themselves."""

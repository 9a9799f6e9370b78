"""What tests need of Lightning where it is not installed: the names of its hooks, and nothing behind them."""

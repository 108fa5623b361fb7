"""What could serve: (endpoint, served model) pairs with what their records say."""

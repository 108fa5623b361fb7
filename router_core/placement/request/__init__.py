"""What is asked: the request as placement sees it, its hints, model names."""

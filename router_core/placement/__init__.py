"""Who should serve this: request, filters, estimates, factors, choice, and the explainable decision."""

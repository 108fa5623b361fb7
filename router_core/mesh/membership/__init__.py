"""Whom to dial, and what silence says about a member."""

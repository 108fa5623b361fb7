"""What a node says about itself: typed bodies, stamps, the bounded codec and the sealed envelope."""

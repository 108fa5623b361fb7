"""Records of members: how they are received, held, published and sent on."""

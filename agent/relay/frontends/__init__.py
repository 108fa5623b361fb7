"""What clients and peers may ask: the local API and the ingress, their routes, lists, codes and replies."""

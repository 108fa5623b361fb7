"""The composition root: the rooms of one node, built and wired, subject by subject. Nothing is decided here.

What a room needs of another it gets as a callable or a Protocol; rooms of one layer meet only here and at the board.
Each module builds the rooms of one subject from those built before it; what runs against that order is a wire of
``node.Assembly``.
"""

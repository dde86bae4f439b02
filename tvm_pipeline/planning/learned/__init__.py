"""Schedulers that were learned, to compare with; their networks are computed with numpy from weights that are shipped.

weights.py            files of weights: their purpose, version, origin and hash
respect_embedding.py  how RESPECT's network sees a graph
pointer_network.py    the network that picks operators one after another
sequences.py          the repair of a sequence, and the best plan along it
respect.py            the scheduler `respect`
"""

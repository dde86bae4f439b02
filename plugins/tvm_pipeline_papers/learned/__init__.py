"""Schedulers that were learned, to compare with; their networks are computed with numpy from weights that are shipped.

weights.py            files of weights: their purpose, version, origin and hash
respect_embedding.py  how RESPECT's network sees a graph
pointer_network.py    the network that picks operators one after another
sequences.py          the repair of a sequence, and the best plan along it
respect.py            the scheduler `respect`
segment_features.py   what a predictor of seconds is told of a segment
segment_predictor.py  PredPar's predictor of the seconds of segments
partition_search.py   PredPar's and Pred-ProfPar's search for cuts
predpar.py            the scheduler `predpar`, and the shipped predictor
"""

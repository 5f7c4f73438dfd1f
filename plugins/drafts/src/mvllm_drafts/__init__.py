"""Methods of speculative decoding: suffix decoding, EAGLE, EAGLE-3 and parallel drafts.

`methods` reads the settings and needs no torch; workers import the proposers.
"""

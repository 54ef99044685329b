"""Inputs that no peer sends and no disk should give back, for every parser: all it may do is raise its own error.

grammar      the schema of a message -> valid trees of it, seeded
mutation     valid trees and bytes -> wrong ones, seeded
parsers      bytes -> the parser, whose answer is checked
campaign     so many inputs, one after the other: crashes, hangs, growing memory; a failing input becomes a file
"""

"""Inputs that no peer sends, for every parser of what comes from the network: all they may do is raise their own error.

grammar      the schema of a message -> valid trees of it, seeded
mutation     valid trees and bytes -> wrong ones, seeded
parsers      bytes -> the parser, whose answer is checked
campaign     so many inputs, one after the other: crashes, hangs, growing memory; a failing input becomes a file
"""

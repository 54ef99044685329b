"""What a run has come to, for people who look at it later: pictures made from the files that it leaves."""

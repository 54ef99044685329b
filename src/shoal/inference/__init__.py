"""What a trained model says: sampling, tokens and text, and the loop that generates."""

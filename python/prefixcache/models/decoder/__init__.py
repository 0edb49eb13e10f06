"""What a decoder is made of, by a checkpoint's names; every runner makes its model of that."""

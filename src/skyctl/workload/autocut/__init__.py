"""Cuts an ordinary ``nn.Module`` into layers, by running its forward on fake tensors."""

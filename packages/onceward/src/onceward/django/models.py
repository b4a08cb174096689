"""No models. Django sends ``post_migrate`` only for apps that have this module."""

"""The platform contract, and how plugins that honour it are found, checked and chosen."""

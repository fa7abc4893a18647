"""Model families of each library that `swap` supports, one row each."""

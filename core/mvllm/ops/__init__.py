"""Operations: a schema and a torch reference each; platforms may provide faster implementations."""

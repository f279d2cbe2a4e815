"""Operations in the form that is fastest for the platform: convolutions, products, attention."""

module streamfold.test/laredo

go 1.19
